"""Modules of PyTorch on a mesh: their parameters become sharded tensors, and training them is what it is locally.

model = module_to_mesh(model, mesh, {"*.up": "column", "*.down": "row"})

A plan says where parameters lie (`plan`); they are cut and sent, or made on the mesh, and hooks place what goes through
the module, gather what is fully sharded, and sum up gradients (`to_mesh`).
"""
