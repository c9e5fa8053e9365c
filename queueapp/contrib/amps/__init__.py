"""Reading the queues of an AMPS configuration, and writing them as classes of Python: what ``importamps`` does.

``xml_reader`` makes elements with their lines of a file, ``elements`` knows what each of them is here, ``convert``
makes queues, says what has no counterpart, and prints them. Nothing here opens a database.
"""
