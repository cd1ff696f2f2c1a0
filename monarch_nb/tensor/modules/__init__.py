"""Modules of PyTorch on a mesh: their parameters become sharded tensors, and training is as for local modules.

model = module_to_mesh(model, mesh, {"*.up": "column", "*.down": "row"})

A plan places parameters (`plan`); they are sharded and sent, or created on the mesh, and hooks place inputs and outputs
of the module, gather fully sharded parameters, and sum gradients (`to_mesh`).
"""
