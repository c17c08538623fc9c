// Elements of the page, and new ones.

export const $ = (id) => document.getElementById(id);

export const make = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
