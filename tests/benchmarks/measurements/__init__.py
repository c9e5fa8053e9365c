"""What is measured: one family of figures per module, in the order that ``figures.FAMILIES`` gives."""
