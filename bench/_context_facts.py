"""A generated knowledge base with planted facts, and questions of three kinds that ask for them.

`words`: the question has the fact's words. `meaning`: it says the same in other words. `names`: it names an
identifier, among many facts that differ in it alone. Distractors are of the same forms.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Asks = Literal["words", "meaning", "names"]

PARAPHRASED = (
    ("The physician's office opens at eight in the morning.", "When does the doctor start seeing patients?"),
    ("Employees receive their salary on the last Friday of the month.", "On which day do workers get paid?"),
    ("Automobiles may be parked in the underground garage only.", "Where can I leave my car?"),
    ("The firm was founded in 1987 by two sisters.", "How old is this company?"),
    ("Annual leave is thirty days for everyone.", "How much vacation do I get each year?"),
    ("Purchases above five hundred euro need the manager's signature.", "Who must approve expensive orders?"),
    ("Notebooks are replaced every four years.", "How often do we get a new laptop?"),
    ("Visitors have to register at the reception desk.", "Where should guests sign in?"),
    ("The canteen serves a vegetarian dish every noon.", "Is there meatless food for lunch?"),
    ("Refunds are transferred within fourteen days.", "How long until customers get their money back?"),
    ("Deliveries to islands take a week longer.", "Is shipping slower to remote places surrounded by water?"),
    ("Production systems are updated on Tuesday nights.", "When do you deploy new releases to live servers?"),
    ("Passwords expire after ninety days.", "How frequently must I change my login secret?"),
    ("Revenue is counted when the goods leave the warehouse.", "At which moment do sales enter the books?"),
    ("The emergency exit is behind the staircase.", "How do we escape if there is a fire?"),
    ("Smoking is allowed on the roof terrace.", "Where may people light a cigarette?"),
    ("Interns are supervised by a senior engineer.", "Who looks after trainees?"),
    ("Contracts end automatically at retirement age.", "Do agreements stop for pensioners?"),
    ("The swimming pool is heated from May to September.", "In which months is the water warm for a swim?"),
    ("Defective items are sent back to the supplier in Lyon.", "What happens with broken products?"),
    ("Children under six travel free of charge.", "Do toddlers pay for the ride?"),
    ("The museum is shut on Mondays.", "Which weekday is the gallery closed?"),
    ("Invoices are archived for ten years.", "How long are bills kept?"),
    ("Dogs must be on a leash in the park.", "Can my pet run without a lead?"),
    ("The attorney answers legal questions on Wednesdays.", "When can I talk to a lawyer?"),
    ("Meetings end ten minutes before the hour.", "Do appointments finish early?"),
    ("The bakery uses flour from its own mill.", "Where does the bread's grain come from?"),
    ("Night shifts are paid one and a half times.", "Is there extra money for working late?"),
    ("Backups are kept on tape in another city.", "Where are copies of the data stored?"),
    ("The orchestra rehearses in the old town hall.", "Where do the musicians practise?"),
    ("Trains to the airport leave every twenty minutes.", "How often does the rail link to the flights run?"),
    ("Complaints are answered by the quality team.", "Who replies to unhappy customers?"),
    ("Fever above thirty-nine degrees requires a hospital visit.", "When must a sick person see a clinic?"),
    ("The harvest begins in the second week of September.", "When are the crops gathered?"),
    ("Wages rise by two percent every spring.", "How does pay grow each year?"),
    ("Bicycles are repaired free of charge on Thursdays.", "When can I have my bike fixed for nothing?"),
    ("The library lends books for three weeks.", "How long may I borrow a novel?"),
    ("Rain water is collected for the gardens.", "How do the plants get watered?"),
    ("The kitchen ovens are cleaned on Sundays.", "When are the stoves washed?"),
    ("Loans above one million need two directors.", "Who signs off very large credits?"),
)  # fmt: skip
PLACES = ("Lisbon", "Oslo", "Turin", "Graz", "Ghent", "Porto", "Basel", "Cork", "Split", "Lund")
THINGS = ("boiler", "turbine", "ledger", "beacon", "furnace", "gateway", "kiln", "pump", "crane", "loom")
PEOPLE = ("Almeida", "Berg", "Conti", "Dupont", "Eriksen", "Fischer", "Garcia", "Horvat", "Ivanov", "Jansen")
TABLES = ("orders", "refunds", "visits", "stock", "claims", "leads", "trips", "meters", "batches", "tickets")
ADVICE = (
    "Restart the service and look at its log before anyone is called.",
    "Wait until the queue is empty, then load the missing hours by hand.",
    "Ask the team on duty, they know which of the two machines is the older one.",
    "The usual reason is a certificate that has run out overnight.",
    "Nothing is lost: the next run fetches what this one did not.",
    "Tell the customers at once, as their reports will be late.",
)


@dataclass(frozen=True, slots=True)
class PlantedFact:
    """A fact, a question that asks for it, and how."""

    text: str
    question: str
    asks: Asks


def planted(seed: int, count: int) -> tuple[list[PlantedFact], list[str]]:
    """Return facts with questions, `count` of words and names each, and the distractors."""
    rng = random.Random(seed)
    facts = [PlantedFact(text, question, "meaning") for text, question in PARAPHRASED]
    pairs = [(thing, place) for thing in THINGS for place in PLACES]
    rng.shuffle(pairs)
    distractors = []
    for number, (thing, place) in enumerate(pairs):
        person, year = rng.choice(PEOPLE), rng.randrange(1950, 2025)
        text = f"The {thing} in {place} was installed by {person} in {year} and is inspected twice a year."
        if number < count:
            question = f"Who installed the {thing} that stands in {place}?"
            facts.append(PlantedFact(text, question, "words"))
        else:
            distractors.append(text)
    codes = rng.sample(range(10_000, 99_999), 3 * count)
    for number, code in enumerate(codes):
        what = f"Error {code}: the {rng.choice(THINGS)} of {rng.choice(TABLES)} does not answer."
        text = " ".join([what, rng.choice(ADVICE), rng.choice(ADVICE)])
        if number < count:
            facts.append(PlantedFact(text, f"We see {code} again this morning, what now?", "names"))
        else:
            distractors.append(text)
    rng.shuffle(facts)
    return facts, distractors
