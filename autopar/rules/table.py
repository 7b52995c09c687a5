"""Lookup over all rule tables.

``rule_for(node, operand_types, extra)`` is the one way to a rule.
"""
