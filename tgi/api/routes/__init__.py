"""One file per group of routes: the falcon resources."""
