"""Write toy_stories.txt beside this file: about 2 MB of small template stories for tests and quick studies.

    python data/make_toy_stories.py

Each story makes up its names, picks its things and places anew, and then says them again and again, within a
line and across lines: a model that copies from its context predicts better than one that knows words only.
The file is the same, byte for byte, on every Python: of the generator only random() is used, the one method
of which Python promises the same numbers from the same seed.
"""
import os
import random

SEED = 1337
N_STORIES = 2100
END = '<|endoftext|>\n'

ONSETS = 'B D F G J K L M N P R S T V Z Br Fl Gr Pl Tr'.split()
MIDDLES = 'a e i o u ai ee oo'.split()
CODAS = 'bo da fi ga ki la lo mi mo na ni no pa po ra ri ro sa ta ti to va vi zu'.split()
KINDS = ('fox wolf bear mouse frog hen goat goose snail crab mole duck pony lamb crow toad hare seal moth '
         'badger beetle cricket donkey gecko').split()
COLOURS = 'red blue green yellow white black brown pink grey purple orange golden silver'.split()
SIZES = 'big small tiny tall round long flat heavy light soft new shiny dusty striped wooden'.split()
THINGS = ('ball boat drum kite lamp bell cup hat box book rope spoon stone basket button blanket whistle '
          'ladder mirror candle feather wagon bucket key ring jar map horn pillow').split()
PLACES = ('the pond|the hill|the old mill|the garden|the river|the forest|the barn|the beach|the bridge|'
          'the well|the market|the meadow|the cave|the big oak|the school|the harbour').split('|')
HIDES = 'under|behind|beside|near|in front of|next to'.split('|')
HIDERS = ('the bench|the fence|the haystack|the stairs|the stove|the apple tree|the mossy log|the blue door|'
          'the cart|the rose bush|the woodpile|the water tank').split('|')
FOODS = 'plum pear cake carrot cookie berry pie bun nut melon cherry pancake turnip muffin'.split()
WEATHERS = 'sunny rainy windy foggy snowy cloudy warm cold bright stormy'.split()
MOODS = 'happy|proud|glad|full of joy|pleased|very happy'.split('|')
NUMBERS = 'two three four five six seven eight nine ten'.split()


def make_story(rng):
    def pick(items):
        return items[int(rng.random() * len(items))]

    def name():
        return pick(ONSETS) + pick(MIDDLES) + pick(CODAS)

    a, b = name(), name()
    while b == a:
        b = name()
    kind_a, kind_b = pick(KINDS), pick(KINDS)
    place = pick(PLACES)
    place_2 = pick([p for p in PLACES if p != place])
    thing = f'{pick(SIZES)} {pick(COLOURS)} {pick(THINGS)}'
    other = f'{pick(SIZES)} {pick(COLOURS)} {pick(THINGS)}'
    spot, food, n = f'{pick(HIDES)} {pick(HIDERS)}', pick(FOODS), pick(NUMBERS)
    mood, weather = pick(MOODS), pick(WEATHERS)

    opening = pick([
        f'Once upon a time there was a {kind_a}. The name of the {kind_a} was {a}. {a} lived near {place}.',
        f'{a} was a {kind_a} who lived near {place}. Every {weather} day {a} went to {place} to play.',
        f'One {weather} day, a {kind_a} named {a} walked to {place}. "I like {place}," said {a}.',
        f'Near {place} lived {a}. {a} was a {kind_a}. All the animals near {place} knew {a} the {kind_a}.',
    ])
    meeting = pick([
        f'{a} had a friend, a {kind_b} named {b}. {a} and {b} did everything together.',
        f'There {a} met {b}. "Who are you?" asked {a}. "I am {b}, the {kind_b}," said {b}.',
        f'{b} the {kind_b} came by. "Hello, {b}!" said {a}. "Hello, {a}!" said {b}.',
    ])
    lost = [
        f'{a} had a {thing}. {a} loved the {thing} very much. But one day the {thing} was gone.',
        f'"Where is my {thing}?" cried {a}. "I do not have your {thing}," said {b}.',
        pick([f'{b} looked {spot}. There was the {thing}! "Your {thing} is {spot}, {a}!" said {b}.',
              f'They looked and looked. At last {a} looked {spot}, and {spot} was the {thing}.']),
        f'{a} took the {thing} home. "Thank you, {b}," said {a}. The {thing} was never {spot} again.',
    ]
    trade = [
        f'{a} had a {thing}, and {b} had a {other}. {b} looked at the {thing}. {a} looked at the {other}.',
        f'"I will give you my {other} for your {thing}," said {b}. "Yes," said {a}, "take the {thing}."',
        f'So {a} got the {other}, and {b} got the {thing}.',
        pick([f'Now {a} played with the {other} all day, and {b} slept beside the {thing}.',
              f'Soon {a} missed the {thing}. "Here is your {thing}," said {b}. {b} got back the {other}.']),
    ]
    share = [
        f'{b} was hungry. {b} wanted a {food}. "Do you have a {food}, {a}?" asked {b}.',
        f'{a} had {n} of them. "I have {n}," said {a}. "One {food} for you, {b}, and one {food} for me."',
        pick([f'They sat {spot} and ate. {b} said, "This is the best {food} near {place}."',
              f'{a} gave {b} a {food}. {b} ate the {food} and said, "Thank you for the {food}, {a}."']),
    ]
    race = [
        f'"Let us race to {place_2}!" said {a}. "To {place_2}?" said {b}. "Yes, to {place_2}!"',
        pick([f'{a} ran fast, {b} ran faster. {b} was the first at {place_2}. "You won, {b}!" said {a}.',
              f'{b} ran fast, {a} ran faster. {a} was the first at {place_2}. "You won, {a}!" said {b}.']),
        f'At {place_2} they found a {other}. "A {other}!" said {a}. "What a {other}!" said {b}.',
    ]
    count = [
        f'{a} found {n} shells at {place_2}. {b} found {n} shells too. "We both have {n}," said {a}.',
        f'At the market they got a {other} for the shells. {b} carried the {other} to {place}.',
    ]
    help_ = [
        f'{a} saw a {other} in the mud at {place_2}. "Help me pull the {other}, {b}!" said {a}.',
        f'{a} pulled and {b} pulled. Out came the {other}. "We did it, {b}!" "We did it, {a}!"',
        f'They washed the {other} in the water and left it {spot}.',
    ]
    plots = [lost, trade, share, race, count, help_]
    first = pick(plots)
    second = pick([plot for plot in plots if plot is not first])
    ending = pick([
        f'{a} and {b} were {mood}. The {kind_a} and the {kind_b} stayed friends for ever.',
        f'{a} went home {mood}. "Good night, {b}," said {a}. "Good night, {a}," said {b}.',
        f'That night {a} the {kind_a} dreamed of {place}, and {b} the {kind_b} dreamed of {place} too.',
        f'And if you go to {place}, you may see {a} the {kind_a} and {b} the {kind_b}.',
    ])
    return '\n'.join([f'{opening} {meeting}', ' '.join(first), ' '.join(second), ending]) + '\n'


def make_text():
    rng = random.Random(SEED)
    return ''.join(make_story(rng) + END for _ in range(N_STORIES))


if __name__ == '__main__':
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'toy_stories.txt')
    with open(path, 'w', encoding='ascii', newline='\n') as f:
        f.write(make_text())
    print(path)
