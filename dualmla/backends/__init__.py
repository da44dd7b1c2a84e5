"""The implementations. They never import each other; `dualmla.selection` knows them all."""
