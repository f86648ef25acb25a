"""Run tests on real MPI ranks under a plain ``pytest``.

The outer pytest never touches MPI. For each MPI stack and rank count it starts one world, an
``mpiexec`` whose ranks run an inner pytest over all items of that count. Every rank streams its
reports to a file, from which the outer process makes exactly one outcome an item. A world that
hangs or dies fails the item it was in and is started again for the rest.
"""
