"""What the user asks for: which device computes, how many bytes the weights may take, in which precision they rest.
Texts are read into frozen values here, once, and errors give the column. No torch.
"""
