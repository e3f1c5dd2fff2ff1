"""Fewer bits: affine quantisation, packed weights, and the methods that choose the integers. Part IV, from 11 on."""
