"""A world of nodes and processes on one virtual clock, run by a seed.

`World` puts them together: processes that want locks, nodes that grant them, connections between,
and faults. It runs the very generators, rounds, claims, pipelines and schedule that production
runs; only the sockets, and the loop over them in `driver.py`, are replaced.

What the world keeps to, since a lock's safety hangs on it:

- A connection delivers in order, each way, whatever delays it; only connections overtake each
  other. A partition delays what is sent and loses nothing (TCP sends again). What is lost is the
  contents of a connection whose node died or which was reset.
- A paused process or node reads nothing, and finds everything on waking. A dead one finds nothing.
- Every random number is a pure function of the seed, its purpose and a count, so that removing one
  fault leaves the delays of all other messages as they were.

No sockets, no threads, no real time.
"""
