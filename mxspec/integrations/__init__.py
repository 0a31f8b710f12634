"""Code that trains the models of other libraries by mxspec's recipes: one module for each library.

The name of the file is the name of the library's package. `mxspec.nn.convert` imports a module of this folder when it
meets a layer of that library. A module has three functions:

- `is_experts(layer)`: whether the module converts this layer;
- `adapt(layer, name, recipe)`: the converted layer. It raises TypeError or ValueError with the reason if the recipe
  cannot run the layer;
- `experts_per_token(layer)`: the number of experts that a token goes to, or None if the layer does not say it.

A module may have more, which users call themselves: `torchtitan.converter` and `transformers.serve`.
"""
