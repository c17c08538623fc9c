"""`tgi bench`: load for any server that speaks OpenAI's or TGI's API, and what it answers with how soon.

Read `run` first: it connects the others.

run           the levels of a benchmark, one after the other: closed loops and Poisson arrivals
workload      what is asked: lengths, shared prefixes, conversations, files
apis          the bodies and events of each API
stream        one streamed HTTP request, recorded with times
figures       percentiles, throughput and goodput of a level
live          what the terminal shows meanwhile
report        the table, the comparison of two results
html          one file with plots

It imports nothing of a server, so that it measures others in the same way.
"""
