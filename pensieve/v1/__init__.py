"""Code generated from ``proto/pensieve/v1/pensieve.proto`` by ``make proto``; never edited by hand."""
