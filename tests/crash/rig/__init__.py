"""The rig of the crash suite: everything that is started, and everything that is done to it.

server       a private PostgreSQL that may be stopped, killed and filled up without an effect on other users
sqlserver    a SQL Server that is there already, for what can be done to it without that
servers      which test runs on which of them
proxy        a TCP proxy that forwards, stalls, loses packets and cuts
processes    worker trees and producers as an init system would run them, and how to kill each part of them
scene        one database of the server with all that happens on it: what a test works with
holding, standstill   another session that holds rows; where a worker can be held up by such a one
schedule, fault_injection  which fault comes when, and carrying it out
explaining          what the faults explain afterwards, and what they do not
waiting      for a condition, with a deadline
"""
