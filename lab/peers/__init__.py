"""Side by side with other engines: each in its own environment and process, behind one small adapter.

``catalogue`` says which there are and how each is set up, ``environments`` builds what they need, ``process`` talks to
one, ``contest`` runs them in turns, ``exactness`` counts whose answers depend on their company. ``host`` and
``adapters`` run in the peers' own environments and use the standard library and the peer alone.
"""
