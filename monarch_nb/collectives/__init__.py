"""Process groups of torch.distributed in the processes of a mesh: their environment, and ending waits in them.

A rank that raises leaves the others in a collective, where they would wait for half an hour. This package records the
connections of groups to end such waits, and abandons the groups on all ranks so that new ones can be created.
"""
