"""Reading the queues of an AMPS configuration, and writing them as classes of Python: what ``importamps`` does.

``reading`` makes elements with their lines of a file, ``elements`` knows what each of them is here, ``converting``
makes queues and says what has no counterpart, ``writing`` prints them. Nothing here opens a database.
"""
