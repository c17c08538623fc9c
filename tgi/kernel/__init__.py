"""The ground floor: messages, links, supervision, settings, logs and metrics. Knows no HTTP and no model."""
