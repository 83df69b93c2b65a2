"""Python imports this first where it is on the path: there the calls fail that a test orders (see nth_call)."""

import nth_call

nth_call.obey_in_this_process()
