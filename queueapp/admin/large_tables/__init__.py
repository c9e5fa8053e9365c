"""Pages over tables of millions: lists whose count stops, a search by bisection, and how far each of them looks."""
