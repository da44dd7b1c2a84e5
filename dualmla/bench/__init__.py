"""How fast is each backend on my shapes, and how far from what this machine can do? What `dualmla bench` and `bench/` share."""
