"""The composition root: builds the process of a controller, of a worker, and clusters in memory."""
