from gputopo.cli.main import main

main()
