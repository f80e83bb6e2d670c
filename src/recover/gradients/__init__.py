"""Gradients of one rank: flat buckets, hooks, exact sums, and buffers that forward writes. No networking: the caller
reduces `inputs(k)` into `outputs(k)`.

`layout` says which parameter lies where and what a tail means, `progress` when a bucket may leave (both pure), `exact`
is the arithmetic, `buckets` holds the memory, `store` ties them to autograd, `buffers` does the like for buffers.
"""
from recover.gradients.buckets import Bucket, Entry
from recover.gradients.buffers import BufferWatch
from recover.gradients.commit import Committed
from recover.gradients.layout import Learned
from recover.gradients.store import GradientStore

__all__ = ["Bucket", "BufferWatch", "Committed", "Entry", "GradientStore", "Learned"]
