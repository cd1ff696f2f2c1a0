"""Worker side of tensor meshes: executes the commands of streams on local shards."""
