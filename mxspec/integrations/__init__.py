"""Code that trains the models of other libraries by mxspec's recipes: one module for each library.

`mxspec.nn.convert` imports a module of this folder when it meets a layer of that library. Nothing else imports it.
"""
