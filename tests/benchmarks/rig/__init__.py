"""What measurements are made with: a database of their own, real worker processes, a sender, a stopwatch, raw SQL
loops."""
