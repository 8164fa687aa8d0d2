"""What is there: the headers of safetensors files and their bytes, the blocks of a component in numbers, and the forms
in which weights are stored. Nothing here decides where a weight goes.
"""
