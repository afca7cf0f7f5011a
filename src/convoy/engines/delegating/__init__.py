"""Engines that arrange data and leave the products to another engine."""
