"""Process groups of torch.distributed in the processes of a mesh: their environment, and how a wait in one is ended.

A rank that raises leaves the others in a collective, where they would wait for half an hour. Here the connections of
their groups are known, so that these waits end, and the groups are given up on all ranks, so that new ones can be made.
"""
