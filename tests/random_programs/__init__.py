"""Random programs of sharded tensors, judged against local torch on the same values.

`python -m tests.random_programs --count 1000` runs many of them; `tests/cluster/test_tensor_random_programs.py` runs a
few every day, and 10,000 of them with the slow tests.
"""
