"""Request and response types: the single truth for what a body may look like, in JSON names and in order.

A field of a request that may be absent may also be null.
"""
