"""What `tsgg.chat` is made of.

sandbox.py    Jinja, for text that nobody trusts
messages.py   messages and tools, checked, in the shape that templates read
guard.py      what stands in a message never becomes a control token
reasoning.py  reasoning and content of an answer
"""
