"""Sums over survivors that end, whatever happens to the peers: the contract and its backends."""
from recover.collectives.contract import GATHER_LIMIT, Backend, Group, Work, create, names, register
from recover.collectives.nccl import NcclBackend
from recover.collectives.tcp import TcpBackend
from recover.collectives.ulfm import UlfmBackend

register("tcp", TcpBackend)
register("ulfm", UlfmBackend)             # MPI is loaded when one is made
register("nccl", NcclBackend)             # and CUDA, too

__all__ = ["GATHER_LIMIT", "Backend", "Group", "Work", "create", "names", "register"]
