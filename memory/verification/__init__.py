"""What `verify` is made from: results side by side, what a call may change and putting it back, a recording of what
each part returned, and a component that computes without the engine.
"""
