"""One component on its devices: its weights at rest and resident, staging and prefetching, the forward hooks that
bring its blocks, what guards it against changes from outside, and the ledger of its bytes.
"""
