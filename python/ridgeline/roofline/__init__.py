"""What an op must move and compute, and what this machine can: the floor is a number."""

from ridgeline.roofline.cost import Cost, cost_of, costed_ops, op_cost

__all__ = ["Cost", "cost_of", "costed_ops", "op_cost"]
