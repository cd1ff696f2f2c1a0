"""Process groups of tensor meshes: how processes join and leave them."""
