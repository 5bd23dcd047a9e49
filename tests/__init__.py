"""The tests of znnpy: folders as in the source tree, and `support`, what they share."""
