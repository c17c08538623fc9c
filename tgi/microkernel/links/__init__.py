"""How messages travel between processes. Read link first.

link       message channels between processes, with connect and disconnect events
liveness   finds silent peers, and measures how long work makes no progress
curve      links between hosts: key files, and who may connect
discovery  which processes of the role downstream there are, by their sockets or addresses
"""
