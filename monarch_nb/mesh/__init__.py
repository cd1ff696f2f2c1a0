"""Host, proc, actor and value meshes."""
