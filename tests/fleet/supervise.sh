#!/bin/sh
# supervise.sh GROUPS COMMAND...: runs a command in these control groups until standard input is
# closed, which also happens if the process at its other end is killed. Then the command is killed,
# and the groups are removed with the groups below them.
set -u
groups=$1
shift
export groups
setpriv --pdeathsig KILL sh -euc \
    'for group in $groups; do echo $$ >"$group/cgroup.procs"; done; exec "$@"' sh "$@" </dev/null &
command=$!
cat >/dev/null
kill -KILL "$command" 2>/dev/null
wait "$command"
# The last processes of the command may need a moment to end.
for attempt in $(seq 600); do
    remaining=
    for group in $groups; do
        [ ! -e "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || remaining=1
    done
    [ -n "$remaining" ] || exit 0
    sleep 0.05
done
echo "supervise.sh: $groups: processes are left after attempt $attempt" >&2
exit 1
