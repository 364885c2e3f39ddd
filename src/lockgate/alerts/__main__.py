import sys

from lockgate.alerts.process import main

if __name__ == "__main__":
    sys.exit(main())
