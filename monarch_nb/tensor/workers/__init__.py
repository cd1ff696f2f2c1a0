"""What runs in the processes of a tensor mesh: each executes the commands of the stream on its own shards."""
