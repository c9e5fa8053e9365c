"""Pages over tables of millions of rows: capped counts, search by bisection, and the limits of both."""
