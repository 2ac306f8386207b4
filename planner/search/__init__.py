"""The search for a plan: strategies behind one interface, `find_plan`."""

from planner.search.strategies import find_plan, find_plans, strategy_named, strategy_names

__all__ = ["find_plan", "find_plans", "strategy_named", "strategy_names"]
