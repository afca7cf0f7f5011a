"""A .pt2 file read as data: parts that are known to be harmless are copied into a new archive, all others are refused.

`torch.export.load` runs code that a file holds in many ways: pickles of custom and opaque objects, symbolic sizes that sympy
evaluates, guards and names that become Python source, targets such as `torch.os.system`. `read_program` therefore reads the
file once, checks each entry, field, name, operator and size against a list of what is allowed, and writes what passed into a
new archive in memory; torch reads that and never the file.

    archive.py        the zip container: entries stored as they are, counted, no two of one name
    fields.py         JSON to torch's own schema, field by field
    expressions.py    symbolic sizes: a parser and evaluator of our own
    operators.py      which operators a program may call
    program.py        names, metadata, signatures; dynamic shapes become those of the example
    sample_inputs.py  the example inputs: a reader of the few pickle instructions that tensors need
    payloads.py       weights and constants: raw bytes with sizes that fit them
    load.py           the parts together
"""

from convoy.zoo.pt2.load import Pt2Program, read_program

__all__ = ["Pt2Program", "read_program"]
