"""Modules of PyTorch on a mesh: their parameters become sharded tensors, and they are trained as locally.

model = module_to_mesh(model, mesh, {"*.up": "column", "*.down": "row"})

A plan places parameters (`plan`); they are cut and sent, or made on the mesh, and hooks place inputs and outputs of the
module, gather fully sharded parameters, and sum up gradients (`to_mesh`).
"""
