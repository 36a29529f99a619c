# Runs a launch script and what it leaves running: ``cat`` ends when no process holds its pipe any more.
cd /work/.eqlen/here
{ bash "$@" 9>&1 >&8 8>&- | timeout 5 cat; exit "${PIPESTATUS[0]}"; } 8>&1
