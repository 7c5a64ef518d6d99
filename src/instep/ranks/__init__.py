"""The ranks of one trainer whose weights lie in several processes.

Every rank makes a `WeightSync` and makes the same calls. Rank 0 leads: it has the engines, takes
every step of a push, and asks the others for their part of it. They follow: each answers until it
is told how the push has ended, and then returns or raises what rank 0 does.

    channel.py    questions and answers, through a store of rank 0; every wait has a deadline, a rank that fails ends everybody's
    liveness.py   a rank whose process has ended is noticed at once, on one host
    run.py        a version as one run of bytes, and which rank gives which elements of it
    gather.py     stretches of the run brought together in rank 0, over a private group
    segment.py    every rank writes its own elements into one shared segment: nothing is gathered
    ipc.py        every rank shares its own shards in GPU memory: nothing is copied before workers read
    lead.py       rank 0: the source of a push
    follow.py     the other ranks
    transports.py all ways from several ranks, and the choice between them
    roles.py      which of these a process is

The trainer's own process groups take no part: nothing here can hang in one of its collectives.
"""
