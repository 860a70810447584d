from runpy import run_module

run_module("wan_ds.bench", run_name="__main__", alter_sys=True)
