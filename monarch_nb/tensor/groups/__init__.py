"""Process groups of tensor meshes: how the processes of a mesh find each other, and let go again."""
