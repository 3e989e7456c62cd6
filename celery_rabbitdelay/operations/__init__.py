"""What an operator does with waiting and undeliverable messages, without a terminal and Spark.

The command line and Spark's readers call this package. Read ``undeliverable`` (a copy of each
message that could not be delivered) and ``progress_bar`` (shown while something takes long).
"""
